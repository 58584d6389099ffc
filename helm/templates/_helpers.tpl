{{- /* What all templates share: names, labels, the image, the registry, the Redis password, and the cards (GPUs) of a pod. */}}
{{- define "baton.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{/* Puts a list of all models into `into`: (dict "root" $ "into" $found), then range $found.models. Each is a context like the top one,
whose Values are those of the release with an entry of `models` over them. `Model` is the entry's name, or "" for the first model;
`RouterSettings` are the entry's block `router`. */}}
{{- define "baton.models" -}}
{{- $root := .root }}
{{- $context := dict "Release" $root.Release "Chart" $root.Chart "Files" $root.Files "Template" $root.Template }}
{{- $models := list (merge (dict "Model" "" "Values" $root.Values) $context) }}
{{- $names := list }}
{{- range $entry := $root.Values.models }}
{{- $_ := required "models: each entry needs a name" $entry.name }}
{{- if has $entry.name $names }}{{ fail (printf "models: the name %s occurs twice" $entry.name) }}{{ end }}
{{- $names = append $names $entry.name }}
{{- $values := deepCopy $root.Values }}
{{- $_ := set $values.model "servedName" list }}
{{- $_ := set $values.model "mountPath" (printf "/models/%s" $entry.name) }}
{{- include "baton.overlay" (dict "values" $values "over" (omit $entry "name" "router")) }}
{{- if not (or $values.model.servedName (eq $values.model.source.kind "download")) }}
{{- $_ := set $values.model "servedName" (list $entry.name) }}
{{- end }}
{{- $models = append $models (merge (dict "Model" $entry.name "Values" $values "RouterSettings" $entry.router) $context) }}
{{- end }}
{{- $_ := set .into "models" $models }}
{{- end }}

{{/* Writes `over` into `values`, key by key; also false, 0 and null. */}}
{{- define "baton.overlay" -}}
{{- $values := .values }}
{{- range $key, $value := .over }}
{{- if and (kindIs "map" $value) (kindIs "map" (get $values $key)) }}
{{- include "baton.overlay" (dict "values" (get $values $key) "over" $value) }}
{{- else }}
{{- $_ := set $values $key $value }}
{{- end }}
{{- end }}
{{- end }}

{{/* First part of the names of a model's objects. */}}
{{- define "baton.modelPrefix" -}}
{{ include "baton.fullname" . }}{{ with .Model }}-{{ . }}{{ end }}
{{- end }}

{{/* Labels that select pods of the release; of one component with "component", and of one model where `root` is one. */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ include "baton.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- if hasKey .root "Model" }}
baton.dev/model: {{ .root.Model | default "main" }}
{{- end }}
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

{{/* The cluster's secret as a file, in every pod of ours when they encrypt. */}}
{{- define "baton.clusterKeyPath" -}}
{{ ternary "/run/secrets/cluster/CLUSTER_KEY" "" .Values.auth.encryptPods }}
{{- end }}

{{- define "baton.clusterKeyMount" -}}
{{- if .Values.auth.encryptPods }}
- {name: cluster-key, mountPath: /run/secrets/cluster, readOnly: true}
{{- end }}
{{- end }}

{{- define "baton.clusterKeyVolume" -}}
{{- if .Values.auth.encryptPods }}
- name: cluster-key
  secret: {secretName: {{ include "baton.secretName" . }}, items: [{key: CLUSTER_KEY, path: CLUSTER_KEY}]}
{{- end }}
{{- end }}

{{- define "baton.secretName" -}}
{{ default (include "baton.fullname" .) .Values.auth.existingSecret }}
{{- end }}

{{- define "baton.serviceAccount" -}}
{{ if .Values.serviceAccount.create }}{{ default (include "baton.fullname" .) .Values.serviceAccount.name }}{{ else }}{{ default "default" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{/* Pools that exist, as a JSON list: `unified` and `encode` only with replicas. */}}
{{- define "baton.pools" -}}
{{- $pools := list "prefill" "decode" }}
{{- if gt (int .Values.unified.replicas) 0 }}{{ $pools = append $pools "unified" }}{{ end }}
{{- if gt (int .Values.encode.replicas) 0 }}{{ $pools = append $pools "encode" }}{{ end }}
{{- $pools | toJson }}
{{- end }}

{{/* Number of cards of a pod of a pool: (dict "root" MODEL "role" "prefill"). */}}
{{- define "baton.cardsPerPod" -}}
{{- $values := .root.Values }}
{{- $pool := index $values .role }}
{{- $ranks := index $pool.engine "tensorParallelSize" | default $values.engine.tensorParallelSize }}
{{- $stages := index $pool.engine "pipelineParallelSize" | default $values.engine.pipelineParallelSize }}
{{- $cards := mul $ranks $stages | int }}
{{- $nodes := int $pool.nodesPerInstance }}
{{- if mod $cards $nodes }}
{{- fail (printf "%s.nodesPerInstance %d does not divide tensorParallelSize times pipelineParallelSize (%d)" .role $nodes $cards) }}
{{- end }}
{{- div $cards $nodes }}
{{- end }}

{{/* Roles for which some model has a pool, as a JSON list. */}}
{{- define "baton.roles" -}}
{{- $found := dict }}{{- include "baton.models" (dict "root" . "into" $found) }}
{{- $roles := list }}
{{- range $found.models }}{{ $roles = concat $roles (include "baton.pools" . | fromJsonArray) | uniq }}{{ end }}
{{- $roles | toJson }}
{{- end }}

{{/* Names of the model: a downloaded one is called as on the hub. */}}
{{- define "baton.servedNames" -}}
{{- if and (not .Values.model.servedName) (eq .Values.model.source.kind "download") -}}
{{ .Values.model.source.download.repository }}
{{- else -}}
{{ join "," .Values.model.servedName }}
{{- end }}
{{- end }}

{{/* Settings as variables: (dict "prefix" "BATON__ROUTER__" "settings" …). maxModelLen -> MAX_MODEL_LEN; null leaves one out. */}}
{{- define "baton.settings" -}}
{{- $prefix := .prefix }}
{{- range $key, $value := .settings }}
{{- if not (or (kindIs "invalid" $value) (and (kindIs "string" $value) (not $value))) }}
{{ $prefix }}{{ $key | snakecase | upper }}: {{ (ternary $value (toJson $value) (kindIs "string" $value)) | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* The registry's URL; Kubernetes expands $(REDIS_PASSWORD) from the variable of this name. */}}
{{- define "baton.registry" -}}
{{- if .Values.redis.bundled -}}
redis://:$(REDIS_PASSWORD)@{{ include "baton.fullname" . }}-redis:6379/0
{{- else -}}
{{ required "redis.external.url is needed when redis.bundled is false" .Values.redis.external.url }}{{ if .Values.redis.external.caSecret }}?ssl_ca_certs=/run/secrets/redis/ca.crt{{ end }}
{{- end }}
{{- end }}

{{- define "baton.redisSecret" -}}
{{ if .Values.redis.bundled }}{{ include "baton.secretName" . }}{{ else }}{{ .Values.redis.external.passwordSecret }}{{ end }}
{{- end }}

{{- define "baton.redisPassword" -}}
{{- with include "baton.redisSecret" . }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: REDIS_PASSWORD}
{{- end }}
{{- end }}

{{- define "baton.redisMount" -}}
{{- if and (not .Values.redis.bundled) .Values.redis.external.caSecret }}
- {name: redis-ca, mountPath: /run/secrets/redis, readOnly: true}
{{- end }}
{{- end }}

{{- define "baton.redisVolume" -}}
{{- if and (not .Values.redis.bundled) .Values.redis.external.caSecret }}
- name: redis-ca
  secret: {secretName: {{ .Values.redis.external.caSecret }}, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
{{- end }}

{{/* What routers and instances have in common of a pod: (dict "root" $ "block" .Values.router). */}}
{{- define "baton.pod" -}}
serviceAccountName: {{ include "baton.serviceAccount" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .block.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .block.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .block.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .block.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
