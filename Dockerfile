# One image for every service; docker-compose.yml and the Helm chart choose the command.
FROM debian:12-slim AS guest
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev linux-libc-dev make \
 && rm -rf /var/lib/apt/lists/*
COPY guest /src/guest
RUN if [ -e /src/guest/Makefile ]; then make -C /src/guest; fi

FROM python:3.11-slim-bookworm
RUN apt-get update \
 && apt-get install -y --no-install-recommends e2fsprogs erofs-utils git \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --system --uid 10001 --create-home --home-dir /var/lib/dsec dsec
WORKDIR /opt/dsec
COPY requirements.lock ./
# The lock also holds the test tools: one lock is one set of versions everywhere.
RUN pip install --no-cache-dir --require-hashes -r requirements.lock
COPY pyproject.toml LICENSE ./
COPY schemas schemas
COPY shared shared
COPY services services
COPY libdsec libdsec
COPY --from=guest /src/guest guest
ENV PYTHONPATH=/opt/dsec PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER dsec
