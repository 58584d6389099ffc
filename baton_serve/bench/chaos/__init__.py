"""`baton-bench chaos`: kill and freeze processes under honest and hostile load; nothing may fail, differ or leak."""
