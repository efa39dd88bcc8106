"""The recipes are repositories in miniature: suites/framework/test_downstream.py copies each out and runs it alone."""

collect_ignore_glob = ["*-op"]
