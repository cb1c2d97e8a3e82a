"""Members of transformers' ``TrainingArguments`` about the process that scripts run in."""
