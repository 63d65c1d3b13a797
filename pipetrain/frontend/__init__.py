"""How Keras' ``fit`` is served: data in, metrics out, stages on devices, and by which strategy the model is trained."""
