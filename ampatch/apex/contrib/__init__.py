"""Empty: none of Apex's contributed modules is replaced. It is there so that an error names the one that was asked for."""
