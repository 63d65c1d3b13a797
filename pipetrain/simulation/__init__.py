"""What training would be: discrete events over the very orders that real runs walk, which give the same trace. Nothing
here knows TensorFlow.
"""
