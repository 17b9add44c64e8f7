# psfleet in a container. Servers and workers use the same image and differ in their command.
#   docker build -t psfleet .
# BASE may be any image with Python 3.11 to 3.13 and its venv module, such as a plain Debian.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# Debian's own Python wants packages in a virtual environment; other bases do not mind one.
RUN python3 -m venv /opt/psfleet
ENV PATH=/opt/psfleet/bin:$PATH PYTHONUNBUFFERED=1

# What the processes write (models, plots, compiled kernels) goes to /work, which they own; the job's
# credentials are in /tls.
RUN useradd --create-home psfleet && mkdir --mode 700 /tls && mkdir /work && chown psfleet /work /tls

# PIP_OPTIONS: where there is no package index, "--no-index --find-links wheels".
ARG EXTRAS=[examples]
ARG PIP_OPTIONS=
# The examples keep their data beside their folder, so they go where the user may write.
COPY . /src
RUN cd /src && pip install --no-cache-dir ${PIP_OPTIONS} ".${EXTRAS}" && \
    cp -r examples /home/psfleet/

USER psfleet
WORKDIR /work
CMD ["psfleet-server"]
