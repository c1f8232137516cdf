"""MindIE-Service's own API: /infer, /v1/tokenizer, stopInfer. It also has the interfaces of OpenAI, TGI and Triton."""
