"""Empty: ampatch replaces none of Apex's contributed modules.

Python imports this package before a module in it, so that errors name the module that the script needs.
"""
