#!/usr/bin/env bash
set -euo pipefail
pip install torch --index-url https://download.pytorch.org/whl/cpu
pip install dlearn-trace
