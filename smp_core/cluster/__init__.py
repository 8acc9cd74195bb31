"""The machines and the ranks on them: launchers, links, the layout's axes and its process groups."""
