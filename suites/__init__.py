"""Every test of fusiongate; installed as `fusiongate.suites`."""
