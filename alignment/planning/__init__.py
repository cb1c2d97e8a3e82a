"""Plans of engines, memory and gradients, made before any weights are loaded."""
