{{- if .Values.llama.enabled }}
args:
  - sh
  - -c
  # ruleid: KH-CONFIG-LLAMA-SLOT-FILES
  - llama-server --host 0.0.0.0 --slot-save-path {{ .Values.slots }}
  {{- toYaml .Values.extra | nindent 2 }}
{{- end }}
