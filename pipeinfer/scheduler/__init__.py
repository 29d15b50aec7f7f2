"""The scheduler: `Scheduler.handle(event) -> instructions`.

Its parts: lanes and their token trees, sequence ids, a queue of speculative tokens by probability,
the prefix cache, and the controller that tunes the settings.

Pure: no module here may depend on ranks, transports, models, clocks or threads. Events bring in all
    data that the scheduler needs.
"""
