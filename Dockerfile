# JupyterLab with dlearn and its lessons, reachable on port 8888 of this machine only:
#   docker build -t dlearn .
#   docker run --rm -p 127.0.0.1:8888:8888 --shm-size=1g dlearn
# Lessons on networks need --cap-add=SYS_ADMIN --cap-add=NET_ADMIN, and say so where they are missing.
FROM python:3.11-slim
RUN useradd --create-home student
COPY . /opt/dlearn
WORKDIR /opt/dlearn
RUN python tools/install_torch.py && pip install --no-cache-dir -c constraints.txt ".[lab,mpi]"
USER student
RUN python course/build.py --students /home/student/lessons
WORKDIR /home/student/lessons
EXPOSE 8888
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--no-browser"]
