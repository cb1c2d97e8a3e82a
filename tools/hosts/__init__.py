"""Two hosts on one machine: network, mount, host name and process namespaces of their own, joined by a link."""
