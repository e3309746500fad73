"""Where the figures of a run go besides the display: TensorBoard, Prometheus, Weights & Biases, MLflow, JSON lines."""
