"""Development tools that run, measure and compare the project, but are not part of the package."""
