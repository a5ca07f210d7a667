"""Training an accelerated network: fine-tuning with labels, distillation without."""
