{{- define "baton.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ include "baton.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "baton.image" -}}
{{ printf "%s/%s-%s:%s" .root.Values.image.registry .root.Values.image.repository .target (default .root.Chart.AppVersion .root.Values.image.tag) }}
{{- end }}

{{- define "baton.secretName" -}}
{{ default (include "baton.fullname" .) .Values.auth.existingSecret }}
{{- end }}

{{- define "baton.serviceAccount" -}}
{{ if .Values.serviceAccount.create }}{{ default (include "baton.fullname" .) .Values.serviceAccount.name }}{{ else }}{{ default "default" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{/* The registry's URL; the bundled Redis takes its password from REDIS_PASSWORD, which Kubernetes expands. */}}
{{- define "baton.registry" -}}
{{ if .Values.redis.bundled }}redis://:$(REDIS_PASSWORD)@{{ include "baton.fullname" . }}-redis:6379/0{{ else }}{{ required "redis.externalUrl is needed when redis.bundled is false" .Values.redis.externalUrl }}{{ end }}
{{- end }}

{{- define "baton.redisPassword" -}}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ include "baton.secretName" . }}, key: REDIS_PASSWORD}
{{- end }}

{{/* maxModelLen -> MAX_MODEL_LEN */}}
{{- define "baton.settingName" -}}
{{ . | snakecase | upper }}
{{- end }}

{{- define "baton.modelVolume" -}}
- name: model
{{- with .Values.model.source }}
{{- if eq .kind "pvc" }}
  persistentVolumeClaim: {claimName: {{ required "model.source.pvc.claimName is needed" .pvc.claimName }}, readOnly: true}
{{- else if eq .kind "hostPath" }}
  hostPath: {path: {{ required "model.source.hostPath.path is needed" .hostPath.path }}, type: Directory}
{{- else }}
  emptyDir: {sizeLimit: {{ .download.sizeLimit }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "baton.modelMount" -}}
- name: model
  mountPath: {{ .Values.model.mountPath }}
{{- if and (eq .Values.model.source.kind "pvc") .Values.model.source.pvc.subPath }}
  subPath: {{ .Values.model.source.pvc.subPath }}
{{- end }}
  readOnly: true
{{- end }}

{{/* Downloads the model once into the volume; `patterns` keeps the router from fetching weights. */}}
{{- define "baton.download" -}}
{{- if eq .root.Values.model.source.kind "download" }}
initContainers:
  - name: download
    image: {{ include "baton.image" (dict "root" .root "target" .target) }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command: ["hf", "download", {{ .root.Values.model.source.download.repository | quote }}, "--revision", {{ .root.Values.model.source.download.revision | quote }}, "--local-dir", {{ .root.Values.model.mountPath | quote }}{{ range .patterns }}, "--include", {{ . | quote }}{{ end }}]
    env:
      - {name: HF_HOME, value: /tmp/hf}
{{- with .root.Values.model.source.download.tokenSecret }}
      - name: HF_TOKEN
        valueFrom:
          secretKeyRef: {name: {{ . }}, key: HF_TOKEN}
{{- end }}
    securityContext: {{- toYaml .root.Values.securityContext | nindent 6 }}
    resources: {requests: {cpu: 500m, memory: 512Mi}, limits: {memory: 2Gi}}
    volumeMounts:
      - {name: model, mountPath: {{ .root.Values.model.mountPath }}}
      - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end }}
