# The router, and the connector that an init container copies into vLLM's image. No torch.
#   docker build -f containers/router.Dockerfile -t tollbridge/router:0.1.0 .
# Python 3.12, because vLLM's image has it: the connector's one binary dependency, xxhash, is built for it.
FROM python:3.12.12-slim-bookworm AS build

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY constraints constraints
COPY src src
RUN python -m venv /opt/tollbridge/venv \
    && /opt/tollbridge/venv/bin/pip install -c constraints/cpu.txt '.[router]' \
    && /opt/tollbridge/venv/bin/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is not None)' \
    && python -m pip install --no-deps -c constraints/cpu.txt --target /opt/tollbridge/plugin . xxhash \
    && rm -rf /opt/tollbridge/plugin/bin

FROM python:3.12.12-slim-bookworm

COPY --from=build /opt/tollbridge /opt/tollbridge
ENV PATH=/opt/tollbridge/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
RUN useradd --uid 1000 --create-home --shell /usr/sbin/nologin tollbridge
USER 1000:1000
EXPOSE 8000
ENTRYPOINT []
CMD ["tollbridge", "router", "--config", "/etc/tollbridge/tollbridge.yaml"]
