# FedLoom for GPUs and CPUs, or with a smaller PyTorch for CPUs alone:
#     docker build -t fedloom .
#     docker build -t fedloom:cpu --build-arg INDEX=... .
#     docker run --rm -v "$PWD/runs:/work/runs" fedloom:cpu run method=feddyn
#     docker run --rm --gpus all -v "$PWD/runs:/work/runs" fedloom run method=feddyn device=cuda
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends git && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-deps --wheel-dir /wheels /source

FROM python:${PYTHON}-slim
# PyTorch's index of builds for the CPU, which are a tenth as large (its installation page names it); empty: the build for GPUs
ARG INDEX=
ARG EXTRAS=plots,images,privacy
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir ${INDEX:+--index-url "$INDEX"} "torch>=2.6" \
    && pip install --no-cache-dir "$(ls /wheels/fedloom-*.whl)[$EXTRAS]" \
    && rm -rf /wheels
RUN useradd --create-home fedloom && mkdir /work && chown fedloom /work
USER fedloom
WORKDIR /work
RUN fedloom run --dry-run > /dev/null
ENTRYPOINT ["fedloom"]
CMD ["--help"]
