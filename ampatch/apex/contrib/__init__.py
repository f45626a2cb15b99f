"""The few of Apex's contributed modules that ampatch replaces, mostly by functions of torch."""
