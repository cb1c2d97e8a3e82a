"""What a script written for TRL imports beside configs and trainers: arguments, the parser, chat formats, mixtures."""
