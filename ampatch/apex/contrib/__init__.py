"""Empty: none of Apex's contributed modules is replaced. So errors name the one that was meant."""
