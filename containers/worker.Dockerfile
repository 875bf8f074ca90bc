# vLLM with the connector in it, for `deploy.install: image`. The base is vLLM's own image, of a version that was tested.
#   docker build -f containers/worker.Dockerfile -t tollbridge/worker:0.1.0-vllm0.25.1 .
FROM vllm/vllm-openai:v0.25.1

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY constraints constraints
COPY src src
# what else it imports, vLLM has; nothing of vLLM's may be replaced
RUN python3 -m pip install --no-deps -c constraints/cpu.txt . xxhash \
    && python3 -c 'import tollbridge.vllm.connector'
WORKDIR /
USER 1000:1000
ENTRYPOINT []
CMD ["python3", "-m", "vllm.entrypoints.openai.api_server", "--help"]
