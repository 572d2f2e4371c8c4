#!/bin/bash
# train.sh DIR OPTION...: begins a run in DIR, or goes on with the one that is there
run=$1
shift
if compgen -G "$run/step-*/index.json" > /dev/null; then
    set -- --resume "$@"
else
    set -- --overwrite "$@"  # the log of a run that died before its first checkpoint
fi
exec infinity train --output "$run" "$@"
