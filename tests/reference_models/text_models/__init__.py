"""Reference implementations of text models, some of them the language models of others here."""
