from keyhole.cli import main

main()
