"""Search over compositions: which method, with which parts and settings, suits these clients?"""
