"""The pytest plugin: thin, and without torch until a fixture needs it."""
