"""Tests of the library and the plugin, one file a module."""
