"""The process that reads prompts and hands their blocks on."""
