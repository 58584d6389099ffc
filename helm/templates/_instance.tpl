{{/* A pool: ConfigMap, Deployment, PodDisruptionBudget. Call with (dict "root" $ "role" "prefill" "pool" .Values.prefill). */}}
{{- define "baton.pool" -}}
{{- $root := .root }}
{{- $pool := .pool }}
{{- $role := .role }}
{{- $name := printf "%s-%s" (include "baton.fullname" $root) $role }}
{{- $prefix := printf "BATON__%s__" (upper $role) }}
{{- $labels := dict "root" $root "component" $role }}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ $name }}
  labels: {{- include "baton.labels" $labels | nindent 4 }}
data:
  {{ $prefix }}MODEL: {{ $root.Values.model.mountPath | quote }}
  {{- with $root.Values.model.servedName }}
  {{ $prefix }}SERVED_MODEL_NAME: {{ join "," . | quote }}
  {{- end }}
  {{ $prefix }}DEVICE: {{ $root.Values.gpu.device | quote }}
  {{- range $key, $value := merge (deepCopy $pool.engine) $root.Values.engine }}
  {{- if not (kindIs "invalid" $value) }}
  {{ $prefix }}{{ include "baton.settingName" $key }}: {{ $value | quote }}
  {{- end }}
  {{- end }}
  {{ $prefix }}KV_TRANSPORT: {{ $root.Values.kvTransfer.transport | quote }}
  {{ $prefix }}KV_CHECKSUM: {{ $root.Values.kvTransfer.checksum | quote }}
  {{ $prefix }}HANDOFF_TIMEOUT_S: {{ $root.Values.kvTransfer.handoffTimeoutSeconds | quote }}
  {{ $prefix }}HOST: "0.0.0.0"
  {{ $prefix }}RPC_PORT: "7001"
  {{ $prefix }}TRANSFER_PORT: "7002"
  {{ $prefix }}EVENTS_PORT: "7003"
  {{ $prefix }}HTTP_PORT: "7004"
  {{ $prefix }}DRAIN_TIMEOUT_S: {{ $pool.drainTimeoutSeconds | quote }}
  {{ $prefix }}LOG_FORMAT: "json"
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  labels: {{- include "baton.labels" $labels | nindent 4 }}
spec:
  {{- if eq $pool.autoscaling.kind "none" }}
  replicas: {{ $pool.replicas }}
  {{- end }}
  revisionHistoryLimit: 3
  # One at a time: a pool never loses more than one instance, and cards are not oversubscribed.
  strategy: {type: RollingUpdate, rollingUpdate: {maxSurge: 0, maxUnavailable: 1}}
  selector:
    matchLabels: {{- include "baton.selector" $labels | nindent 6 }}
  template:
    metadata:
      labels: {{- include "baton.labels" $labels | nindent 8 }}
      annotations:
        checksum/config: {{ toJson (list $root.Values.engine $pool.engine $root.Values.kvTransfer $root.Values.model) | sha256sum }}
        {{- with $pool.podAnnotations }}{{ toYaml . | nindent 8 }}{{ end }}
    spec:
      serviceAccountName: {{ include "baton.serviceAccount" $root }}
      automountServiceAccountToken: false
      enableServiceLinks: false
      terminationGracePeriodSeconds: {{ $pool.terminationGracePeriodSeconds }}
      {{- with $root.Values.image.pullSecrets }}
      imagePullSecrets: {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- toYaml $root.Values.podSecurityContext | nindent 8 }}
        {{- if and $root.Values.gpu.renderGroup (ne $root.Values.gpu.device "cpu") }}
        supplementalGroups: [{{ $root.Values.gpu.renderGroup }}]
        {{- end }}
      {{- with $pool.priorityClassName }}
      priorityClassName: {{ . }}
      {{- end }}
      {{- with $pool.nodeSelector }}
      nodeSelector: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $pool.tolerations }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $pool.topologySpreadConstraints }}
      topologySpreadConstraints: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if $pool.affinity }}
      affinity: {{- toYaml $pool.affinity | nindent 8 }}
      {{- else if and $root.Values.kvTransfer.usm.enabled (eq $role "decode") }}
      affinity:
        podAffinity:
          preferredDuringSchedulingIgnoredDuringExecution:
            - weight: 100
              podAffinityTerm:
                topologyKey: kubernetes.io/hostname
                labelSelector:
                  matchLabels: {{- include "baton.selector" (dict "root" $root "component" "prefill") | nindent 20 }}
      {{- end }}
      {{- with $root.Values.gpu.dra }}
      {{- if .enabled }}
      resourceClaims:
        - {name: gpu, resourceClaimTemplateName: {{ include "baton.fullname" $root }}-gpu}
      {{- end }}
      {{- end }}
      {{- include "baton.download" (dict "root" $root "target" (printf "worker-%s" $root.Values.gpu.device) "patterns" list) | nindent 6 }}
      containers:
        - name: {{ $role }}
          image: {{ include "baton.image" (dict "root" $root "target" (printf "worker-%s" $root.Values.gpu.device)) }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          args:
            - {{ $role }}
            {{- range $pool.extraArgs }}
            - {{ . | quote }}
            {{- end }}
          envFrom:
            - configMapRef: {name: {{ $name }}}
          env:
            {{- if $root.Values.redis.bundled }}
            {{- include "baton.redisPassword" $root | nindent 12 }}
            {{- end }}
            - {name: {{ $prefix }}REGISTRY, value: {{ include "baton.registry" $root | quote }}}
            - name: {{ $prefix }}INSTANCE_ID
              valueFrom: {fieldRef: {fieldPath: metadata.name}}
            - name: {{ $prefix }}ADVERTISE_HOST
              valueFrom: {fieldRef: {fieldPath: status.podIP}}
            {{- with $pool.extraEnv }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          ports:
            - {name: rpc, containerPort: 7001}
            - {name: transfer, containerPort: 7002}
            - {name: events, containerPort: 7003}
            - {name: http, containerPort: 7004}
          startupProbe:
            httpGet: {path: /health, port: http}
            periodSeconds: 5
            failureThreshold: {{ div $pool.startupTimeoutSeconds 5 }}
          readinessProbe:
            httpGet: {path: /health, port: http}
            periodSeconds: 5
          livenessProbe:
            httpGet: {path: /health, port: http}
            periodSeconds: 10
            failureThreshold: 6
          securityContext: {{- toYaml $root.Values.securityContext | nindent 12 }}
          resources:
            {{- $resources := deepCopy $pool.resources }}
            {{- if and $root.Values.gpu.resourceName (not $root.Values.gpu.dra.enabled) }}
            {{- $_ := set $resources "limits" (merge (dict $root.Values.gpu.resourceName 1) ($resources.limits | default dict)) }}
            {{- end }}
            {{- toYaml $resources | nindent 12 }}
            {{- if $root.Values.gpu.dra.enabled }}
            claims: [{name: gpu}]
            {{- end }}
          volumeMounts:
            {{- include "baton.modelMount" $root | nindent 12 }}
            - {name: tmp, mountPath: /tmp}
            - {name: shm, mountPath: /dev/shm}
            {{- if $root.Values.kvTransfer.usm.enabled }}
            - {name: sockets, mountPath: /run/baton}
            {{- end }}
            {{- with $pool.extraVolumeMounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
      volumes:
        {{- include "baton.modelVolume" $root | nindent 8 }}
        - {name: tmp, emptyDir: {}}
        - {name: shm, emptyDir: {medium: Memory}}
        {{- if $root.Values.kvTransfer.usm.enabled }}
        - {name: sockets, hostPath: {path: {{ $root.Values.kvTransfer.usm.hostPath }}, type: DirectoryOrCreate}}
        {{- end }}
        {{- with $pool.extraVolumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
{{- if $pool.pdb.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $name }}
  labels: {{- include "baton.labels" $labels | nindent 4 }}
spec:
  maxUnavailable: {{ $pool.pdb.maxUnavailable }}
  selector:
    matchLabels: {{- include "baton.selector" $labels | nindent 6 }}
{{- end }}
{{- end }}
