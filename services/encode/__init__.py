"""The process of an encode instance: encodes the images of prompts for prefill and unified instances."""
