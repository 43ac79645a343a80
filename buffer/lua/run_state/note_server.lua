-- Notes which server the run is at, to tell a group that the server lost from one whose worker died.
-- Reply: 1
-- @include lib/server
lost_with_server(0)
return 1
