"""`dynaserve profile`: measures how long steps take on this machine, before anything is served."""
