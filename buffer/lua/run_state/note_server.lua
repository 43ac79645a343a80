-- Records the run's server, to distinguish groups lost by the server from those of dead workers.
-- Request: nothing.   Reply: 1
-- @include lib/server
lost_with_server(0)
return 1
