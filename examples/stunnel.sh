#!/bin/bash
# Trains behind mutual TLS, where no OpenSSH joins the hosts. On each of the hosts a and b, with the same job.pem:
#   bash stunnel.sh NUMBER "a b" train.py
# NUMBER is 0 on a, 1 on b. stunnel listens on port 4000 + NUMBER; workers on loopback interfaces, ports 3000, 3001.
# job.pem is a key and its certificate. Who has it is let in, so keep it (chmod 600). Once for a job:
#   openssl req -x509 -newkey rsa:3072 -nodes -days 30 -subj /CN=train -keyout job.key -out job.crt
#   cat job.key job.crt > job.pem
set -euo pipefail
number=$1
read -ra hosts <<< "$2"
shift 2
folder=$(mktemp -d)
workers=()
{
  printf '%s\n' "foreground = yes" "pid =" "syslog = no" "debug = err" "sslVersionMin = TLSv1.3"
  printf '%s\n' "cert = $PWD/job.pem" "CAfile = $PWD/job.pem" "verifyPeer = yes"  # of both sides
  for n in "${!hosts[@]}"; do
    workers+=("127.0.0.1:$((3000 + n))")
    if [ "$n" = "$number" ]; then
      printf '%s\n' "[worker $n]" "accept = :::$((4000 + n))" "connect = 127.0.0.1:$((3000 + n))"
    else
      printf '%s\n' "[worker $n]" "client = yes" "accept = 127.0.0.1:$((3000 + n))" \
        "connect = ${hosts[n]}:$((4000 + n))" "delay = yes"
    fi
  done
} > "$folder/stunnel.conf"
stunnel "$folder/stunnel.conf" &
trap 'kill $!; rm -r "$folder"' EXIT
# PMI_RANK says which worker this is, as MPI would.
PMI_RANK=$number "${PYTHON:-python3}" -m pipetrain launch --hosts "$(IFS=,; echo "${workers[*]}")" "$@"
