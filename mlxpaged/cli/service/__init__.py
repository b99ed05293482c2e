"""`mlxpaged service`: the server as a service of the user, of launchd on a Mac and of systemd on Linux."""
