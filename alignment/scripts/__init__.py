"""What scripts written for TRL import besides configs and trainers: arguments, parser, chat formats, mixtures."""
