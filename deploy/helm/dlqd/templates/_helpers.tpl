{{/* The name of the release's objects. It begins with dlqd, because the alert DlqdDown looks for such scrape jobs. */}}
{{- define "dlqd.name" -}}
{{- if hasPrefix "dlqd" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}{{ printf "dlqd-%s" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "dlqd.selector" -}}
app.kubernetes.io/name: dlqd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "dlqd.labels" -}}
{{ include "dlqd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "dlqd.image" -}}
{{- with .Values.image -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{/* Pod Security "restricted". The user has a number, so that Kubernetes can tell that it is not root. */}}
{{- define "dlqd.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.serviceAccount.name }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "dlqd.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "dlqd.database" -}}
- --database-url-file=/run/secrets/dlqd-database/url
- --schema={{ .Values.database.schema }}
- --river-schema={{ .Values.database.riverSchema }}
{{- end }}

{{- define "dlqd.databaseVolume" -}}
- name: database
  secret:
    secretName: {{ .Values.database.secret }}
    defaultMode: 0440
    items: [{key: {{ .Values.database.key | quote }}, path: url}
      {{- with .Values.database.replicaKey }}, {key: {{ . | quote }}, path: replica-url}{{ end }}]
{{- end }}
