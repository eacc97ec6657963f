# make lab      install and open the notebooks           make notebooks  execute and clean them in place
# make test     install and run every check              make bench      run the benchmarks
# make lint     look over code and notebooks             make clean      remove what these left behind
# make runs     train the stored runs of notebook 04 again
#
# PYTHON names the interpreter that .venv is made from, ARGS goes to the command: make lab ARGS=--no-browser, make test ARGS=notebooks.
# Everything is in tools/course.py, which needs no make: python tools/course.py lab

ifeq ($(OS),Windows_NT)
PYTHON ?= py
else
PYTHON ?= python3
endif

.PHONY: lab test lint notebooks bench bench-peers runs clean
lab test lint notebooks bench bench-peers runs clean:
	@$(PYTHON) tools/course.py $@ $(ARGS)
