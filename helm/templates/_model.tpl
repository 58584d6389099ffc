{{- /* How a model's weights get into a pod: a persistent volume claim, a host path or a download; its volume, mount and init containers. */}}

{{/* The volume of a model: (dict "root" MODEL "cache" (include "baton.cacheKind" …) "volume" NAME). */}}
{{- define "baton.modelVolume" -}}
{{- $cache := .root.Values.model.source.download.cache }}
- name: {{ .volume }}
{{- with .root.Values.model.source }}
{{- if eq .kind "pvc" }}
  persistentVolumeClaim: {claimName: {{ required "model.source.pvc.claimName is needed" .pvc.claimName }}, readOnly: true}
{{- else if eq .kind "hostPath" }}
  hostPath: {path: {{ required "model.source.hostPath.path is needed" .hostPath.path }}, type: Directory}
{{- else if eq $.cache "pvc" }}
  persistentVolumeClaim: {claimName: {{ $cache.claimName | default (include "baton.cacheClaim" $.root) }}}
{{- else if eq $.cache "hostPath" }}
  hostPath: {path: {{ $cache.hostPath }}, type: DirectoryOrCreate}
{{- else }}
  emptyDir: {sizeLimit: {{ $cache.size }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "baton.cacheClaim" -}}
{{ include "baton.modelPrefix" . }}-model
{{- end }}

{{/* Where a pod keeps the download: pvc, hostPath or emptyDir. Routers need only the tokenizer, and run on any node: they share a
claim only if it can be mounted everywhere. (dict "root" $ "role" "router") */}}
{{- define "baton.cacheKind" -}}
{{- $cache := .root.Values.model.source.download.cache }}
{{- $isShared := and (eq $cache.kind "pvc") (has "ReadWriteMany" $cache.accessModes) }}
{{- if and (eq .role "router") (not $isShared) }}emptyDir{{ else }}{{ $cache.kind }}{{ end }}
{{- end }}

{{/* Folder of the model inside a container. Downloads of different models and revisions do not mix: old pods still read theirs. */}}
{{- define "baton.modelFolder" -}}
{{- $source := .Values.model.source }}
{{- .Values.model.mountPath }}{{ if eq $source.kind "download" }}/{{ $source.download.revision }}/{{ $source.download.repository }}{{ end }}
{{- end }}

{{/* Its mount: (dict "root" MODEL "volume" NAME). */}}
{{- define "baton.modelMount" -}}
- name: {{ .volume }}
  mountPath: {{ .root.Values.model.mountPath }}
{{- if and (eq .root.Values.model.source.kind "pvc") .root.Values.model.source.pvc.subPath }}
  subPath: {{ .root.Values.model.source.pvc.subPath }}
{{- end }}
  readOnly: true
{{- end }}

{{/* Downloads what is not there yet: (dict "root" MODEL "role" "decode" "target" IMAGE "block" .Values.decode "volume" NAME).
`block` has the pod's extraEnv with proxies, and extraVolumeMounts with certificates of authorities. */}}
{{- define "baton.download" -}}
{{- if eq .root.Values.model.source.kind "download" }}
{{- $source := .root.Values.model.source.download }}
{{- $cache := include "baton.cacheKind" . }}
{{- if eq $cache "hostPath" }}
{{- include "baton.ownFolder" (dict "root" .root "target" .target "volume" .volume "path" .root.Values.model.mountPath) }}
{{- end }}
- name: {{ .volume | replace "model" "download" }}
  image: {{ include "baton.image" (dict "root" .root "target" .target) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: ["python", "-c"]
  args: [{{ .root.Files.Get "files/download.py" | toJson }}]
  {{- with .block.extraEnvFrom }}
  envFrom: {{- toYaml . | nindent 4 }}
  {{- end }}
  env:
    - {name: HOME, value: /tmp}
    - {name: HF_HOME, value: /tmp/hf}
    - {name: REPOSITORY, value: {{ $source.repository | quote }}}
    - {name: REVISION, value: {{ $source.revision | quote }}}
    - {name: FOLDER, value: {{ include "baton.modelFolder" .root | quote }}}
    - {name: LIMIT_BYTES, value: {{ include "baton.downloadLimit" (dict "cache" $cache "size" $source.cache.size) | quote }}}
    # A router needs no weights.
    - {name: PATTERNS, value: {{ ternary (list "*.json" "*.jinja" "*.txt") list (eq .role "router") | toJson | quote }}}
    {{- with $source.tokenSecret }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef: {name: {{ . }}, key: HF_TOKEN}
    {{- end }}
    {{- with .block.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  securityContext: {{- toYaml .root.Values.securityContext | nindent 4 }}
  resources: {requests: {cpu: 500m, memory: 512Mi}, limits: {memory: 2Gi}}
  volumeMounts:
    - {name: {{ .volume }}, mountPath: {{ .root.Values.model.mountPath }}}
    - {name: tmp, mountPath: /tmp}
    {{- with .block.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
{{- end }}

{{/* Bytes of the emptyDir's limit, which the file system does not show; 0 for other volumes. */}}
{{- define "baton.downloadLimit" -}}
{{- $factor := get (dict "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776) (regexFind "[A-Za-z]+$" .size) }}
{{- if eq .cache "emptyDir" }}{{ mul (regexFind "^[0-9]+" .size) $factor }}{{ else }}0{{ end }}
{{- end }}

{{/* Makes the pods' user the owner of a hostPath volume: the folder on the node belongs to root, and fsGroup does not change that. */}}
{{- define "baton.ownFolder" }}
- name: own-{{ .volume }}
  image: {{ include "baton.image" (dict "root" .root "target" .target) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: ["chown", "{{ .root.Values.podSecurityContext.runAsUser }}:{{ .root.Values.podSecurityContext.runAsGroup }}", {{ .path | quote }}]
  securityContext:
    runAsNonRoot: false
    runAsUser: 0
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities: {drop: [ALL], add: [CHOWN]}
  resources: {requests: {cpu: 10m, memory: 16Mi}, limits: {memory: 64Mi}}
  volumeMounts:
    - {name: {{ .volume }}, mountPath: {{ .path }}}
{{- end }}
