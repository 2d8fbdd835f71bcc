"""All tasks by name, one file for each kind."""

from task import Task

from tasks import autoencoders, embeddings, language, mnist, physics, tables, vision

TASKS: dict[str, Task] = {
    name: task
    for kind in (mnist, autoencoders, language, physics, tables, vision, embeddings)
    for name, task in kind.TASKS.items()
}
