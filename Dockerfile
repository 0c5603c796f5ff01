# The page beside TensorRT-LLM, on NVIDIA's release image: the worker uses the image's Python, the
# page an environment of its own.
#
#   docker build -t specdec-trtllm .
#   docker run --rm -it --gpus all --ipc host --network host \
#       --ulimit memlock=-1 --ulimit stack=67108864 \
#       -v specdec:/root/.cache specdec-trtllm
FROM nvcr.io/nvidia/tensorrt-llm/release:1.2.1

# The image pins packages for its own Python, and those are not the page's.
ENV PIP_CONSTRAINT="" \
    SPECDEC_TRTLLM_PYTHON=/usr/bin/python3

RUN apt-get update && \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends make python3-venv && \
    rm -rf /var/lib/apt/lists/*

WORKDIR /specdec
COPY Makefile requirements.txt constraints.txt ./
RUN make .venv/runs
COPY . .

CMD ["make", "run"]
