# An image for workers and scripts: docker build -t train .  Then, on each host or as pods of examples/kubernetes.yaml:
#   docker run --rm train pipetrain env
#   docker run --rm --network none train pipetrain launch --local 2 examples/sequential.py
FROM python:3.11-slim
WORKDIR /train
COPY pyproject.toml README.md ./
COPY pipetrain pipetrain
RUN pip install --no-cache-dir .
COPY examples examples
COPY experiments/data experiments/data
RUN useradd --create-home --uid 1000 train
USER 1000
CMD ["pipetrain", "env"]
