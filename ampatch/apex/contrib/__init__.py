"""Empty: none of Apex's contributed modules is replaced.

Python imports this package before it asks for a module in it. So errors name the module that was meant.
"""
