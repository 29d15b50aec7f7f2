"""The one supervisor: `pipeinfer up`, and what the launch scripts hand over to.

Starts the launcher, owns the HTTP process, watches the job, starts it again, moves it to other
hosts. `rules`, `changes` and `overlap` decide and know no process; the rest acts. Knows neither MPI
nor what a request is: the HTTP process says whether one is open.
"""
