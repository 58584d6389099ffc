{{- /* The pods of a pool of instances: ConfigMap with settings, Deployment or LeaderWorkerSet, probes, grace period of an end,
limits of resources and PodDisruptionBudget. Call with (dict "root" MODEL "role" "prefill"), see baton.models. */}}
{{- define "baton.pool" -}}
{{- $root := .root }}
{{- $role := .role }}
{{- $values := $root.Values }}
{{- $pool := index $values $role }}
{{- $name := printf "%s-%s" (include "baton.modelPrefix" $root) $role }}
{{- $labels := dict "root" $root "component" $role }}
{{- $settings := include "baton.pool.settings" . }}
{{- $nodes := int $pool.nodesPerInstance }}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ $name }}
  labels: {{- include "baton.labels" $labels | nindent 4 }}
data: {{- $settings | nindent 2 }}
---
{{- if gt $nodes 1 }}
{{- if not $values.auth.encryptPods }}
{{- fail (printf "%s.nodesPerInstance %d needs auth.encryptPods: the pods of an instance meet with the cluster's key" $role $nodes) }}
{{- end }}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  name: {{ $name }}
  labels: {{- include "baton.labels" $labels | nindent 4 }}
spec:
  {{- if eq $pool.autoscaling.kind "none" }}
  replicas: {{ $pool.replicas }}
  {{- end }}
  rolloutStrategy: {type: RollingUpdate, rollingUpdateConfiguration: {maxSurge: 0, maxUnavailable: 1}}
  leaderWorkerTemplate:
    size: {{ $nodes }}
    # The pods that are left wait for one that was lost, and the instance forms again.
    restartPolicy: None
    leaderTemplate: {{- include "baton.pool.pod" (dict "root" $root "role" $role "node" "leader") | nindent 6 }}
    workerTemplate: {{- include "baton.pool.pod" (dict "root" $root "role" $role "node" "worker") | nindent 6 }}
{{- else }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  labels: {{- include "baton.labels" $labels | nindent 4 }}
spec:
  {{- /* files/deployments.py sets the number: in the manifest it would compete with `kubectl scale`. */}}
  {{- if and (eq $pool.autoscaling.kind "none") (not $values.upgradeJobs.enabled) }}
  replicas: {{ $pool.replicas }}
  {{- end }}
  revisionHistoryLimit: 3
  # One at a time and none on top: a pool never loses more than one instance, and a new one finds a free card. Routers have these
  # seconds to find a new instance before the next one ends.
  minReadySeconds: 5
  strategy: {type: RollingUpdate, rollingUpdate: {maxSurge: 0, maxUnavailable: 1}}
  selector:
    matchLabels: {{- include "baton.selector" $labels | nindent 6 }}
  template: {{- include "baton.pool.pod" (dict "root" $root "role" $role "node" "") | nindent 4 }}
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

{{/* Settings of a pool: the engine's, then the pool's own over them, then what the chart decides. */}}
{{- define "baton.pool.settings" -}}
{{- $values := .root.Values }}
{{- $pool := index $values .role }}
{{- $settings := dict }}
{{- range $key, $value := $values.engine }}{{ $_ := set $settings $key $value }}{{ end }}
{{- range $key, $value := $pool.engine }}{{ $_ := set $settings $key $value }}{{ end }}
{{- $decided := dict
      "model" (include "baton.modelFolder" .root)
      "servedModelName" (include "baton.servedNames" .root)
      "device" $values.gpu.device
      "host" "0.0.0.0"
      "rpcPort" 7001
      "transferPort" 7002
      "eventsPort" 7003
      "httpPort" 7004
      "kvTransport" $values.kvTransfer.transport
      "kvChecksum" $values.kvTransfer.checksum
      "kvRankTransfers" $values.kvTransfer.rankTransfers
      "kvTailParts" $values.kvTransfer.tailParts
      "kvZeromqConnections" $values.kvTransfer.zeromqConnections
      "kvLeaseS" $values.kvTransfer.leaseSeconds
      "kvRunDir" (ternary "/run/baton" "" $values.kvTransfer.usm.enabled)
      "clusterKeyFile" (include "baton.clusterKeyPath" .root)
      "drainTimeoutS" $pool.drainTimeoutSeconds
      "logLevel" $values.logging.level
      "logFormat" $values.logging.format
      "otlpTracesEndpoint" $values.tracing.otlpTracesEndpoint }}
{{- range $key, $value := $decided }}{{ $_ := set $settings $key $value }}{{ end }}
{{- include "baton.settings" (dict "prefix" (printf "BATON__%s__" (upper .role)) "settings" $settings) | trim }}
{{- end }}

{{/* The template of an instance's pod: (dict "root" MODEL "role" "prefill" "node" ""). With nodesPerInstance `node` is leader, the pod
that routers reach, or worker, which computes only. */}}
{{- define "baton.pool.pod" -}}
{{- $root := .root }}
{{- $role := .role }}
{{- $values := $root.Values }}
{{- $pool := index $values $role }}
{{- $name := printf "%s-%s" (include "baton.modelPrefix" $root) $role }}
{{- $prefix := printf "BATON__%s__" (upper $role) }}
{{- $labels := dict "root" $root "component" $role }}
{{- $target := printf "worker-%s" $values.gpu.device }}
{{- $image := include "baton.image" (dict "root" $root "target" $target) }}
{{- $settings := include "baton.pool.settings" . }}
{{- $isCard := ne $values.gpu.device "cpu" }}
{{- $cards := include "baton.cardsPerPod" . | int }}
{{- $isWorker := eq .node "worker" }}
metadata:
  labels:
    {{- include "baton.labels" $labels | nindent 4 }}
    {{- with $pool.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    checksum/config: {{ $settings | sha256sum }}
    {{- with $pool.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  {{- include "baton.pod" (dict "root" $root "block" $pool) | nindent 2 }}
  {{- with $pool.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  # The drain: no new work, requests end or are handed over, leases run out. preStop waits for it; SIGTERM is the same.
  {{- $drain := add $pool.drainTimeoutSeconds $values.kvTransfer.leaseSeconds (ceil $values.engine.drainHandoverS | int) 10 }}
  terminationGracePeriodSeconds: {{ add $drain 20 }}
  securityContext:
    {{- toYaml $values.podSecurityContext | nindent 4 }}
    {{- if and $values.gpu.renderGroup $isCard }}
    supplementalGroups: [{{ $values.gpu.renderGroup }}]
    {{- end }}
  {{- if $pool.affinity }}
  affinity: {{- toYaml $pool.affinity | nindent 4 }}
  {{- else if and $values.kvTransfer.usm.enabled (has $role (list "decode" "encode")) }}
  affinity:
    podAffinity:
      preferredDuringSchedulingIgnoredDuringExecution:
        - weight: 100
          podAffinityTerm:
            topologyKey: kubernetes.io/hostname
            labelSelector:
              matchLabels: {{- include "baton.selector" (dict "root" $root "component" "prefill") | nindent 16 }}
  {{- end }}
  {{- if $values.gpu.dra.enabled }}
  resourceClaims:
    - {name: gpu, resourceClaimTemplateName: {{ include "baton.modelPrefix" $root }}-gpu{{ if gt $cards 1 }}-{{ $cards }}{{ end }}}
  {{- end }}
  {{- $prepares := and $values.kvTransfer.usm.enabled $values.kvTransfer.usm.prepareHostPath }}
  {{- if or $prepares (eq $values.model.source.kind "download") $pool.extraInitContainers }}
  initContainers:
    {{- if $prepares }}
    {{- include "baton.ownFolder" (dict "root" $root "target" $target "volume" "sockets" "path" "/run/baton") | nindent 4 }}
    {{- end }}
    {{- include "baton.download" (dict "root" $root "role" $role "target" $target "block" $pool "volume" "model") | nindent 4 }}
    {{- with $pool.extraInitContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ $role }}
      image: {{ $image }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      args:
        - {{ $role }}
        {{- range $pool.extraArgs }}
        - {{ . | quote }}
        {{- end }}
      envFrom:
        - configMapRef: {name: {{ $name }}}
        {{- with $pool.extraEnvFrom }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      env:
        {{- include "baton.redisPassword" $root | nindent 8 }}
        - {name: {{ $prefix }}REGISTRY, value: {{ include "baton.registry" $root | quote }}}
        - name: {{ $prefix }}INSTANCE_ID
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - name: {{ $prefix }}ADVERTISE_HOST
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- if .node }}
        # The pods of an instance meet at the leader.
        - {name: {{ $prefix }}NNODES, value: {{ $pool.nodesPerInstance | quote }}}
        {{- if $isWorker }}
        - {name: {{ $prefix }}NODE_RANK, value: "$(LWS_WORKER_INDEX)"}
        - {name: {{ $prefix }}MASTER_ADDR, value: "$(LWS_LEADER_ADDRESS)"}
        {{- else }}
        - name: {{ $prefix }}MASTER_ADDR
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- end }}
        {{- end }}
        # Caches of compiled kernels; the root file system is read-only.
        - {name: HOME, value: /tmp}
        # Else bars of progress stand between the log lines.
        - {name: HF_HUB_DISABLE_PROGRESS_BARS, value: "1"}
        {{- with $pool.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if not $isWorker }}
      ports:
        - {name: rpc, containerPort: 7001}
        - {name: transfer, containerPort: 7002}
        - {name: events, containerPort: 7003}
        - {name: http, containerPort: 7004}
      startupProbe:
        httpGet: {path: /health, port: http}
        {{- toYaml $pool.probes.startup | nindent 8 }}
      readinessProbe:
        httpGet: {path: /health, port: http}
        {{- toYaml $pool.probes.readiness | nindent 8 }}
      livenessProbe:
        httpGet: {path: /health, port: http}
        {{- toYaml $pool.probes.liveness | nindent 8 }}
      lifecycle:
        preStop:
          exec: {command: ["baton", "drain", "127.0.0.1:7004", "--no-exit", "--timeout-s={{ $drain }}"]}
      {{- end }}
      securityContext: {{- toYaml $values.securityContext | nindent 8 }}
      resources:
        {{- $resources := deepCopy $pool.resources }}
        {{- if and $values.gpu.resourceName $isCard (not $values.gpu.dra.enabled) }}
        {{- $_ := set $resources "limits" (merge (dict $values.gpu.resourceName $cards) ($resources.limits | default dict)) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
        {{- if $values.gpu.dra.enabled }}
        claims: [{name: gpu}]
        {{- end }}
      volumeMounts:
        {{- include "baton.modelMount" (dict "root" $root "volume" "model") | nindent 8 }}
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        {{- if $values.kvTransfer.usm.enabled }}
        - {name: sockets, mountPath: /run/baton}
        {{- end }}
        {{- include "baton.redisMount" $root | nindent 8 }}
        {{- include "baton.clusterKeyMount" $root | nindent 8 }}
        {{- with $pool.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $pool.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "baton.modelVolume" (dict "root" $root "cache" (include "baton.cacheKind" .) "volume" "model") | nindent 4 }}
    - {name: tmp, emptyDir: {}}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $pool.shmSizeLimit }}}}
    {{- if $values.kvTransfer.usm.enabled }}
    - {name: sockets, hostPath: {path: {{ $values.kvTransfer.usm.hostPath }}, type: DirectoryOrCreate}}
    {{- end }}
    {{- include "baton.redisVolume" $root | nindent 4 }}
    {{- include "baton.clusterKeyVolume" $root | nindent 4 }}
    {{- with $pool.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
