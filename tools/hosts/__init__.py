"""Two hosts on one machine, with separate network, mount, UTS and PID namespaces, connected by a link."""
