"""For researchers: experiments that no other package needs, used by `keyhole lab`."""
