-- Records the run's server, to distinguish groups lost by the server from those of dead workers.
-- Request: nothing.   Reply: 1
lost_with_server(0)
return 1
