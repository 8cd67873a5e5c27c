{{- define "afresh.name" -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "afresh.selector" -}}
app.kubernetes.io/name: afresh
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "afresh.labels" -}}
{{ include "afresh.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end }}

{{- define "afresh.config" -}}
{{ required "set `config`: the content of serve.toml" .Values.config }}
[fleet]
nats = {{ required "set `fleet.nats`: the NATS servers" .Values.fleet.nats | toJson }}
store = {{ required "set `fleet.store`: the store of saved sandboxes" .Values.fleet.store | toJson }}
fleet = {{ .Values.fleet.name | toJson }}
lease = {{ .Values.fleet.lease | toJson }}
replicas = {{ .Values.fleet.replicas }}
{{- if .Values.fleet.natsCredentials }}
credentials = "/etc/afresh/nats/credentials"
{{- end }}
{{- if .Values.fleet.natsCa }}
ca = "/etc/afresh/nats/ca.crt"
{{- end }}
{{- if .Values.fleet.natsCertificate }}
certificate = "/etc/afresh/nats/tls.crt"
certificate-key = "/etc/afresh/nats/tls.key"
{{- end }}
{{- if .Values.fleet.entryKeySecret }}
entry-key = "/etc/afresh/entry-key/key"
{{- end }}
{{- if .Values.fleet.requireSealed }}
require-sealed = true
{{- end }}
{{- end }}

{{- define "afresh.agentSandboxSelector" -}}
app.kubernetes.io/name: afresh-agent-sandbox
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "afresh.agentSandboxLabels" -}}
{{ include "afresh.agentSandboxSelector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end }}
